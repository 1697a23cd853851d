"""Pictures of the row tiles that a kernel takes, and of the parts that a product of grouped tensors multiplies."""

from trencadis.viz.draw import show, show_gemm
from trencadis.viz.mosaic import Mosaic
from trencadis.viz.picture import Picture
from trencadis.viz.product import Product
from trencadis.viz.raster import Raster

__all__ = ["Mosaic", "Picture", "Product", "Raster", "show", "show_gemm"]
