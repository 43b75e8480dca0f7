"""The fault suite of `examples/faults/`: its cases, what other tools say of them, and the table in the docs."""
