"""What programs compute, as data: one row an operation (``point.py``), and the decoder's rows (``decoder.py``)."""
