#define LK_FAMILY "linear.inc"
#define LK_FAMILY_NAME lk_family_linear
#define LK_TILES
#include "each_isa.h"
