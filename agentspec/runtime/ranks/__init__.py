"""One engine's steps on several ranks: the leader's plans reach the other ranks through shared memory, and every rank
runs the same plans on its own part of the model.

Nothing here starts or watches processes; engine/ranks.py does."""
