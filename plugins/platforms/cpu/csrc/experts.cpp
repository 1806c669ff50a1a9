#define LK_FAMILY "experts.inc"
#define LK_FAMILY_NAME lk_family_experts
#define LK_BYTES
#define LK_TILES
#include "each_isa.h"
