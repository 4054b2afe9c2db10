"""Around the loss: Hugging Face's trainer, schedules of beta, shares of a batch.

Imports ``data``, ``capture`` and ``teacher``. Start with ``trainer.py``.
"""
