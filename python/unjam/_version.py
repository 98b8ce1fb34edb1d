"""The version of the Python package; libunjam.so must have the same major and minor number."""

__version__ = "0.1.0"
