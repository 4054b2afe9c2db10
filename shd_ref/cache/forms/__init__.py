"""What a record can hold of a sample: ``form.py`` is the interface, ``table.py`` is where a new form is entered."""
