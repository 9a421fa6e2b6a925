// The layout of a packed row in 16-bit words; codes are packed as in `mlx_tq.codec.packing`.
//
// BITS names a format: 32 and 16 are the model's own dtype, 8 is q8; 4, 3 and 2 are tq4, tq3 and tq2.
#include "tq_compat.h"

// A row as attention reads it, from the words at which the codes of values and both scales begin. Of latents, keys are
// values too, and their codes and scales are the same.
template <int VALUE_START, int KEY_SCALE_START, int VALUE_SCALE_START, int ROW_WORDS>
struct tq_places {
  enum { KEYS = 0, VALUES = VALUE_START, KEY_SCALE = KEY_SCALE_START, VALUE_SCALE = VALUE_SCALE_START, WORDS = ROW_WORDS };
};

// A row: key codes, value codes, key scale, value scale, and a zero word if the number of words is odd.
template <int KEY_DIM, int KEY_BITS, bool KEY_WIDE, int VALUE_DIM, int VALUE_BITS, bool VALUE_WIDE>
struct tq_row {
  enum {
    KEYS = 0,
    VALUES = KEY_DIM * KEY_BITS / 16,
    KEY_SCALE = VALUES + VALUE_DIM * VALUE_BITS / 16,
    VALUE_SCALE = KEY_SCALE + (KEY_BITS > 8 ? 0 : KEY_WIDE ? 2 : 1),
    END = VALUE_SCALE + (VALUE_BITS > 8 ? 0 : VALUE_WIDE ? 2 : 1),
    WORDS = END + END % 2
  };
};
