"""The parts of examples/train_gpt.py."""
