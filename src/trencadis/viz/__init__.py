"""Pictures: what a kernel does with its row tiles, and which parts a product of grouped tensors multiplies."""

from trencadis.viz.draw import show as show
from trencadis.viz.mosaic import Mosaic as Mosaic
from trencadis.viz.picture import Picture as Picture
from trencadis.viz.product import Product as Product
