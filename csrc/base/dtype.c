/* Sizes of the element types. */
#include "dsc/types.h"

size_t dsc_dtype_bytes(dsc_dtype dtype)
{
    switch (dtype) {
    case DSC_DTYPE_F32:
        return 4;
    case DSC_DTYPE_BF16:
    case DSC_DTYPE_F16:
        return 2;
    case DSC_DTYPE_COUNT:
        break;
    }
    return 0;
}
