"""Published formats for comparison: no measurement supports them as a default, and help texts do not list them."""

from mlx_tq.codec.formats.compared import block_formats, grouped, spectral

FORMATS = (*block_formats.FORMATS, *grouped.FORMATS, *spectral.FORMATS)
