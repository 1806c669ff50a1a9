#include <stdlib.h>
#define LK_FAMILY "sample.inc"
#define LK_FAMILY_NAME lk_family_sample
#include "each_isa.h"
