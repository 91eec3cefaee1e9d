"""Saving: what the state is, a copy of it that training can't change, and how that copy becomes a checkpoint."""
