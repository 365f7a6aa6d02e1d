#include "client/dsactl/content.h"

#include <stdbool.h>

uint64_t content_chain(uint64_t parent, uint64_t block_id)
{
    struct ref64_rng rng = content_rng(parent, block_id, UINT64_C(0xb10c));

    return ref64_rng_u64(&rng);
}

struct ref64_rng content_rng(uint64_t chain, uint64_t a, uint64_t b)
{
    struct ref64_rng rng = ref64_rng_init(chain);

    rng.state = ref64_rng_u64(&rng) ^ (a * UINT64_C(0xd6e8feb86659fd93));
    rng.state = ref64_rng_u64(&rng) ^ (b * UINT64_C(0xa0761d6478bd642f));
    return rng;
}

/* Bits straight into the format: random sign and mantissa, one of four exponents. No rounding, no libm: the
 * same on every machine and cheap enough to make whole prompts. */
static uint16_t value_of(uint64_t r)
{
    return (uint16_t)((r & 0x807f) | ((124 + ((r >> 7) & 3)) << 7));
}

void content_fill(struct ref64_rng *rng, uint16_t *values, size_t n)
{
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        uint64_t r = ref64_rng_u64(rng);

        values[i] = value_of(r);
        values[i + 1] = value_of(r >> 16);
        values[i + 2] = value_of(r >> 32);
        values[i + 3] = value_of(r >> 48);
    }
    for (; i < n; i++)
        values[i] = value_of(ref64_rng_u64(rng));
}

void content_row(uint64_t chain, uint64_t position, uint32_t layer, uint16_t *row, size_t d_qk)
{
    struct ref64_rng rng = content_rng(chain, position, layer);

    content_fill(&rng, row, d_qk);
}

struct selection {
    uint64_t *marks;
    int32_t *indices;
    uint32_t n, room;
};

static bool take(struct selection *s, uint64_t position)
{
    uint64_t bit = UINT64_C(1) << (position % 64);

    if (s->n == s->room || (s->marks[position / 64] & bit))
        return false;
    s->marks[position / 64] |= bit;
    s->indices[s->n++] = (int32_t)position;
    return true;
}

static void take_heavy(struct selection *s, uint64_t chain, uint64_t n_tokens, uint32_t n, uint32_t layer)
{
    /* The same hash at every step: a token that was heavy stays heavy while the sequence grows, as positions
     * beyond the length are drawn from ever larger powers of two and skipped until they exist. */
    struct ref64_rng rng = content_rng(chain, layer, UINT64_C(0x4ea7));
    uint64_t span = 64;

    for (uint64_t p = 0; p < 4 && p < n_tokens; p++)
        take(s, p);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t p = (uint64_t)ref64_rng_below(&rng, (int64_t)span);

        if (p < n_tokens)
            take(s, p);
        if (i % 16 == 15 && span < n_tokens)
            span *= 2;
    }
}

uint32_t content_select(uint64_t chain, uint64_t n_tokens, uint32_t topk, uint32_t layer, uint64_t *marks,
                        int32_t *indices)
{
    struct selection s = {marks, indices, 0, topk};
    struct ref64_rng rng = content_rng(chain, n_tokens, UINT64_C(0x5e1) + layer);
    uint32_t n;

    if (n_tokens <= topk) {
        for (uint64_t p = 0; p < n_tokens; p++)
            indices[s.n++] = (int32_t)p;
    } else {
        for (uint32_t i = 0; i < (topk + 3) / 4; i++)
            take(&s, n_tokens - 1 - i);
        take_heavy(&s, chain, n_tokens, topk / 4, layer);
        /* More than topk tokens exist, so a free one is always left; walk on from a taken one to find it. */
        while (s.n < topk) {
            uint64_t p = (uint64_t)ref64_rng_below(&rng, (int64_t)n_tokens);

            while (!take(&s, p))
                p = (p + 1) % n_tokens;
        }
        for (uint32_t i = 0; i < s.n; i++)
            marks[(uint32_t)indices[i] / 64] = 0;
    }
    n = s.n;
    for (uint32_t i = n; i < topk; i++)
        indices[i] = -1;
    return n;
}
