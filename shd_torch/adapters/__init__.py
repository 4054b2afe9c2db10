"""``attention_kl`` as the judge calls it, one backend at a time; the maps' own adapter is ``maps/judged.py``."""
