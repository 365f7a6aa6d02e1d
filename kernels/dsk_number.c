/* dsk_number.c - the public scalar conversions. Pure, any thread. */
#include "dsk.h"
#include "dsk_number_inline.h"

uint8_t dsk_e4m3_from_f32(float x)
{
    if (x != x)
        return 0x7f;
    return num_e4m3_from_number(x);
}

float dsk_e4m3_to_f32(uint8_t byte)
{
    return num_e4m3_to_f32(byte);
}

uint16_t dsk_bf16_from_f32(float x)
{
    return num_bf16_from_f32(x);
}

float dsk_bf16_to_f32(uint16_t bits)
{
    return num_bf16_to_f32(bits);
}
