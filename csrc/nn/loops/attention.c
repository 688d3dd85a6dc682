/* Compiled once per instruction set: the loops over scores of attention. */
#include "cpu/math.h"
#include "nn/table.h"

/* tanh(x), within 2e-7. */
static inline float bounded(float x)
{
    float e = dsc_exp_nonpositive(-2.0f * fabsf(x));
    float t = (1.0f - e) / (1.0f + e);

    return x < 0.0f ? -t : t;
}

void DSC_K(nn_bend)(int64_t n, float cap, float slope, float distance, dsc_f32 *s)
{
    if (cap > 0.0f) {
        EACH for (int64_t i = 0; i < n; i++) s[i] = cap * bounded(s[i] / cap);
    }
    if (slope != 0.0f) {
        EACH for (int32_t i = 0; i < (int32_t)n; i++) s[i] -= slope * fabsf(distance + (float)i);
    }
}

void DSC_K(nn_hide)(int64_t n, const int32_t *ids, int32_t id, float value, dsc_f32 *s)
{
    EACH for (int64_t i = 0; i < n; i++) s[i] = ids[i] == id ? s[i] : value;
}

void DSC_K(nn_raise)(int64_t n, const dsc_f32 *s, dsc_f32 *max)
{
    EACH for (int64_t i = 0; i < n; i++) max[i] = s[i] > max[i] ? s[i] : max[i];
}

void DSC_K(nn_exp_below)(int64_t n, const dsc_f32 *shift, dsc_f32 *s, dsc_f32 *sum)
{
    EACH for (int64_t i = 0; i < n; i++)
    {
        float e = dsc_exp_nonpositive(s[i] - shift[i]);

        s[i] = e;
        sum[i] += e;
    }
}

void DSC_K(nn_attention_grad)(int64_t n, float cap, float slope, float distance, float lse, float delta, dsc_f32 *s,
                              dsc_f32 *dp)
{
    if (cap > 0.0f) {
        EACH for (int32_t i = 0; i < (int32_t)n; i++)
        {
            float t = bounded(s[i] / cap);
            float p = dsc_exp_nonpositive(cap * t - slope * fabsf(distance - (float)i) - lse);

            s[i] = p;
            dp[i] = p * (dp[i] - delta) * (1.0f - t * t);
        }
    } else {
        EACH for (int32_t i = 0; i < (int32_t)n; i++)
        {
            float p = dsc_exp_nonpositive(s[i] - slope * fabsf(distance - (float)i) - lse);

            s[i] = p;
            dp[i] = p * (dp[i] - delta);
        }
    }
}
