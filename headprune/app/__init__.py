"""The application: datasets, models by name, run folders, reports. It builds on the library; the library knows nothing of it."""
