"""The gallery of `flexsparse.masks` as one page: ``python -m flexsparse.gallery gallery.html``."""
