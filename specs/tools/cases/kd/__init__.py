"""Cases of ``specs/kd.md``: losses on logits and on hidden states, and the inputs that they share."""
