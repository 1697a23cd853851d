from trencadis.backends.reference import *
