"""What a run will cost, found out without running it: compile for absent GPUs, read the program, compare with formulas.

No communication. See README.md in this folder for what flows in and out. Nothing is imported here, so that the parts
without jax (`cards`, `formulas`, `hlo`) stay cheap to import.
"""
