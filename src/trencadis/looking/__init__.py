"""Looking: the picture of a schedule or a product (`show`), the reasons of a plan (`why`), and the command line."""

from trencadis.looking.door import show as show
from trencadis.looking.mosaic import Mosaic as Mosaic
from trencadis.looking.picture import Picture as Picture
from trencadis.looking.product import Product as Product
from trencadis.looking.reasons import Why as Why
from trencadis.looking.reasons import why as why
