"""Pictures of the row tiles that a kernel takes, and of the parts that a product of grouped tensors multiplies."""

from trencadis.viz.draw import show as show
from trencadis.viz.draw import show_gemm as show_gemm
from trencadis.viz.mosaic import Mosaic as Mosaic
from trencadis.viz.picture import Picture as Picture
from trencadis.viz.product import Product as Product
from trencadis.viz.raster import Raster as Raster
