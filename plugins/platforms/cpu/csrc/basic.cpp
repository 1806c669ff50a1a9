#define LK_FAMILY "basic.inc"
#define LK_FAMILY_NAME lk_family_basic
#include "each_isa.h"
