#define LK_FAMILY "route.inc"
#define LK_FAMILY_NAME lk_family_route
#include "each_isa.h"
