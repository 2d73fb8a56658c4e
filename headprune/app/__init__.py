"""The application: datasets, models by name, run folders, reports. It builds on the library; the library knows nothing of it."""

MAX_SEED = 2**31 - 1  # NumPy takes no more than 2**32 - 1, and some draws add to it
