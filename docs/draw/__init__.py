"""The pictures of the site: python -m docs.draw [NAME ...] writes docs/pictures/NAME.png."""
