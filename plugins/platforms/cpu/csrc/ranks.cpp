#include "ranks.h"

#define LK_FAMILY "ranks.inc"
#define LK_FAMILY_NAME lk_family_ranks
#include "each_isa.h"
