#define LK_FAMILY "rowops.inc"
#define LK_FAMILY_NAME lk_family_rowops
#include "each_isa.h"
