"""Looking: the picture of a schedule (`show`), the reasons of a plan (`why`), and the command line over both."""

from trencadis.looking.mosaic import Mosaic as Mosaic
from trencadis.looking.mosaic import show as show
from trencadis.looking.reasons import Why as Why
from trencadis.looking.reasons import why as why
