"""Opening a teacher's file, which is untrusted: size bounds, wiring, external weights, old operator sets."""
