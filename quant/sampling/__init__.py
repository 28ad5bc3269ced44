"""`quantize sample`: a business-like calibration set drawn from logs; start at `sample.py`."""
