.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint bench coverage

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv: the pinned development packages and this project
	@scripts/setup.sh

demo: setup ## train, kill in the middle of a save, resume, compare
	.venv/bin/ckptstore demo

test: ## set up all that tests need, run every check and every test
	@scripts/setup.sh tests
	scripts/check.sh
	.venv/bin/pytest -n 2 --dist loadgroup --durations 10

check: setup ## lint, format, types and import rules, without tests
	scripts/check.sh

lint: setup ## repair what ruff can: lint and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup ## time save and load beside torch.save and torch.load
	.venv/bin/python benchmarks/save_load.py

coverage: ## run the tests and show the branches that none takes
	@scripts/setup.sh tests
	.venv/bin/pytest -n 2 --dist loadgroup --cov --cov-branch --cov-report term-missing
