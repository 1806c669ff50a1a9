#define LK_FAMILY "basic.inc"
#define LK_FAMILY_NAME lk_family_basic
#define LK_BYTES
#include "each_isa.h"
