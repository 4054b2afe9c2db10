"""How each form of a record is made from a run of the teacher, measured, and compared when the teacher runs again."""
