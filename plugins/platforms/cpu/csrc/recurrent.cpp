#define LK_FAMILY "recurrent.inc"
#define LK_FAMILY_NAME lk_family_recurrent
#include "each_isa.h"
