"""How long does training stop, when is a save durable, and how fast does it load, beside peers and physical limits?

    python benchmarks/save_load.py                          the reference workload, ckptstore beside torch.save
    python benchmarks/save_load.py --all --rounds 9         every peer that can be imported
    python benchmarks/save_load.py --state large --all      2 GB in 400 large and 2,000 tiny tensors
    python benchmarks/save_load.py --state small --all      20,000 tensors of 4 KB

Each subject lives in a process of its own, and they take turns, A B C A B C …, so that a change of the machine's mood
meets all of them. Ratios are formed within a round, against the limits measured in the same round. The first round,
in fresh processes, is reported apart from the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

DEFAULT = [
    "limit: memory copy",
    "limit: raw disk",
    "ckptstore copy",
    "ckptstore overlap",
    "ckptstore sync",
    "torch.save",
]
GROUP = 5  # subjects in memory at once besides the limits


def make_states(kind: str) -> dict[str, Any]:
    """Return the states of one benchmark."""
    import workload

    if kind == "reference":
        return workload.reference().states()
    if kind == "large":
        return {"state": workload.synthetic([5 << 20] * 400 + [4096] * 2000)}
    return {"state": workload.synthetic([4096] * 20000)}


def serve(name: str, kind: str, folder: str, pipe: Any) -> None:
    """Run one subject in this process, on command."""
    import warnings

    warnings.simplefilter("ignore")
    import torch
    from subjects import SUBJECTS

    torch.set_num_threads(2)
    try:
        states = make_states(kind)
        subject = SUBJECTS[name](states, Path(folder))
    except Exception as error:  # noqa: BLE001 - a peer that can't be imported is reported and left out
        pipe.send({"error": repr(error)})
        return
    pipe.send({"loads": subject.loads, "bytes": sum(tensor.nbytes for tensor in subject.flat().values())})
    step = 0
    try:
        while (command := pipe.recv()) != "end":
            if command == "save":
                step += 1
                pipe.send(measure_save(subject, step))
            elif command == "call":
                pipe.send(measure_calls(subject))
            else:
                pipe.send(measure_load(subject, step, cold=command == "cold"))
        subject.close()
    finally:
        pipe.close()


def measure_save(subject: Any, step: int) -> dict[str, float]:
    """Save once and return seconds and bytes."""
    subject.folder.mkdir(parents=True, exist_ok=True)
    gc.collect()
    before, written = memory_bytes("VmRSS"), io_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    cpu = cpu_seconds()
    started = time.perf_counter()
    subject.save(step)
    stall = time.perf_counter() - started
    subject.settle()
    durable = time.perf_counter() - started
    result = {
        "stall_s": stall + subject.stall_later_s,
        "durable_s": durable,
        "cpu_s": cpu_seconds() - cpu,
        "memory_bytes": max(0, memory_bytes("VmHWM") - before),
        "written_bytes": io_bytes() - written,
    }
    if step > 1:
        subject.clean(step if hasattr(subject, "wait") else step - 1)
    return result


def measure_load(subject: Any, step: int, *, cold: bool) -> dict[str, float]:
    """Load once into the live tensors, from the page cache or from the disk."""
    target = subject.target(step)
    for path in [target, *target.rglob("*")] if target.is_dir() else [target]:
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            if cold:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(handle, 16 << 20):
                    pass
            os.close(handle)
    subject.cold = cold
    gc.collect()
    cpu, started = cpu_seconds(), time.perf_counter()
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    subject.load(step)
    return {
        "load_s": time.perf_counter() - started,
        "cpu_s": cpu_seconds() - cpu,
        "memory_bytes": max(0, memory_bytes("VmHWM") - before),
    }


def measure_calls(subject: Any) -> dict[str, float]:
    """Time the objects' own ``state_dict`` calls."""
    started = time.perf_counter()
    subject.tensors()
    return {"state_dict_s": time.perf_counter() - started}


def memory_bytes(field: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def io_bytes() -> int:
    """Return the bytes that this process has sent to storage."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def cpu_seconds() -> float:
    """Return the processor time of this process and its children."""
    total, ticks = sum(os.times()[:4]), os.sysconf("SC_CLK_TCK")
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


class Child:
    """One subject's process."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self.name, self.folder = name, folder
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, kind, str(folder), theirs))
        self._process.start()
        theirs.close()
        self.about = self._receive()

    def ask(self, command: str) -> dict[str, Any]:
        """Let the subject do something and return its measurement; one that fails reports its error."""
        self._pipe.send(command)
        return self._receive()

    def end(self) -> None:
        """End the process and remove its files."""
        if self._process.is_alive() and "error" not in self.about:
            self._pipe.send("end")
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _receive(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._pipe.recv()
        except EOFError:
            found = {"error": "the process ended"}
        return found


def run_group(names: list[str], kind: str, rounds: int, root: Path) -> dict[str, Any]:
    """Measure a few subjects, taking turns; return all rounds of each."""
    children = [Child(name, kind, root / f"subject_{number}") for number, name in enumerate(names)]
    found: dict[str, Any] = {
        child.name: {"about": child.about, "saves": [], "warm": [], "cold": []} for child in children
    }
    for number in range(rounds + 1):
        for child in children:
            record = found[child.name]
            if "error" in record["about"]:
                continue
            saved = child.ask("save")
            if "error" in saved:
                record["about"] |= saved
                continue
            record["saves"].append(saved)
            if number and record["about"]["loads"]:
                record["warm"].append(child.ask("warm"))
                record["cold"].append(child.ask("cold"))
    for child in children:
        if "error" not in child.about:
            found[child.name]["calls"] = child.ask("call")
        child.end()
    return found


def median(values: list[float]) -> float:
    """Return the median, nan for nothing."""
    return statistics.median(values) if values else float("nan")


def quantile(values: list[float], share: float) -> float:
    """Return a quantile by rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def summarise(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a subject: medians, and ratios to the limits of the same round."""
    rows = []
    seen = set()
    for group in groups:
        copies = group["limit: memory copy"]["saves"]
        disks = group["limit: raw disk"]["saves"]
        reads = group["limit: raw disk"]
        for name, record in group.items():
            if name in seen:
                continue
            seen.add(name)
            row: dict[str, Any] = {"name": name, "error": record["about"].get("error")}
            rows.append(row)
            saves = record["saves"][1:]
            if not saves:
                continue
            gigabytes = record["about"]["bytes"] / 1e9
            ratios = [save["stall_s"] / copy["stall_s"] for save, copy in zip(saves, copies[1:], strict=False)]
            row |= {
                "first_stall_s": record["saves"][0]["stall_s"],
                "stall_s": median([save["stall_s"] for save in saves]),
                "stall_p90_s": quantile([save["stall_s"] for save in saves], 0.9),
                "stall_to_copy": median(ratios),
                "durable_s": median([save["durable_s"] for save in saves]),
                "durable_to_disk": median(
                    [save["durable_s"] / disk["durable_s"] for save, disk in zip(saves, disks[1:], strict=False)]
                ),
                "cpu_s_per_gb": median([save["cpu_s"] for save in saves]) / gigabytes,
                "memory_mb": median([save["memory_bytes"] for save in saves]) / 1e6,
                "written_mb": median([save["written_bytes"] for save in saves]) / 1e6,
                "state_dict_s": record.get("calls", {}).get("state_dict_s"),
            }
            for temperature in ("warm", "cold"):
                loads = [load for load in record[temperature] if "error" not in load]
                limits = reads[temperature]
                row[f"{temperature}_load_s"] = median([load["load_s"] for load in loads])
                row[f"{temperature}_to_read"] = median(
                    [load["load_s"] / limit["load_s"] for load, limit in zip(loads, limits, strict=False)]
                )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows for people."""
    head = f"{'':28} {'stall s':>8} {'p90':>7} {'/copy':>6} {'first':>6} {'durable':>8} {'/disk':>6} {'CPU s/GB':>8}"
    print(f"{head} {'MB more':>8} {'warm s':>7} {'/read':>6} {'cold s':>7} {'/read':>6}")
    for row in rows:
        if "stall_s" not in row:
            print(f"{row['name']:28} not measured: {str(row['error'])[:90]}")
            continue
        print(
            f"{row['name']:28} {row['stall_s']:8.3f} {row['stall_p90_s']:7.3f} {row['stall_to_copy']:6.2f} "
            f"{row['first_stall_s']:6.2f} {row['durable_s']:8.3f} {row['durable_to_disk']:6.2f} "
            f"{row['cpu_s_per_gb']:8.2f} {row['memory_mb']:8.0f} {row['warm_load_s']:7.3f} {row['warm_to_read']:6.2f} "
            f"{row['cold_load_s']:7.3f} {row['cold_to_read']:6.2f}"
        )


def print_classic(rows: list[dict[str, Any]], kind: str) -> None:
    """Print the classic breakdown: serialise, write, their sum, and what saving in the background leaves of it."""
    import io

    import torch

    states = make_states(kind)
    state = {name: item.state_dict() if hasattr(item, "state_dict") else item for name, item in states.items()}
    serialise, write = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            started = time.perf_counter()
            buffer = io.BytesIO()
            torch.save(state, buffer)
            serialise.append(time.perf_counter() - started)
            started = time.perf_counter()
            with (Path(folder) / "file").open("wb") as file:
                file.write(buffer.getbuffer())
                os.fsync(file.fileno())
            write.append(time.perf_counter() - started)
    total = median(serialise) + median(write)
    stall = next(row["stall_s"] for row in rows if row["name"] == "ckptstore copy")
    print(
        f"classic: serialise {median(serialise) * 1e3:.1f} ms + write {median(write) * 1e3:.1f} ms = "
        f"{total * 1e3:.1f} ms; "
        f"stall in the background {stall * 1e3:.1f} ms, {100 * (1 - stall / total):.0f} % saved"
    )


def main() -> None:
    """Measure and print."""
    from subjects import SUBJECTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", choices=["reference", "large", "small"], default="reference")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after one in fresh processes")
    parser.add_argument("--all", action="store_true", help="every subject")
    parser.add_argument("--only", action="append", choices=list(SUBJECTS), help="a subject besides the limits")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    options = parser.parse_args()
    names = list(SUBJECTS) if options.all else (options.only or DEFAULT)
    limits = ["limit: memory copy", "limit: raw disk"]
    others = [name for name in names if name not in limits]
    root = Path(tempfile.mkdtemp(prefix="ckptstore-bench-", dir=options.folder))
    try:
        groups = [
            run_group(limits + others[start : start + GROUP], options.state, options.rounds, root)
            for start in range(0, len(others), GROUP)
        ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    rows = summarise(groups)
    print(f"{options.state} state, {options.rounds} rounds; {platform.machine()}, {os.cpu_count()} cores")
    print_table(rows)
    print_classic(rows, options.state)
    if options.json:
        options.json.write_text(
            json.dumps(
                {"options": vars(options) | {"json": None, "folder": None}, "rows": rows, "groups": groups}, default=str
            )
        )


if __name__ == "__main__":
    main()
