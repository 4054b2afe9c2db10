"""The binding as the judge calls it: maps, ``attention_kl`` by backend, and the kernels by themselves."""
