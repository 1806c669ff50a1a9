#define LK_FAMILY "integer.inc"
#define LK_FAMILY_NAME lk_family_integer
#define LK_BYTES
#define LK_TILES
#include "each_isa.h"
