#define LK_FAMILY "attention.inc"
#define LK_FAMILY_NAME lk_family_attention
#define LK_TILES
#include <stdlib.h>
#include "attention.h"
#include "each_isa.h"
