/* dsc_scaler: any accepted configuration, fed any overflows and saved states, keeps a finite positive scale that moves by the factor or to the floor only. */
#include "fuzz.h"

#include "dsc/scaler.h"

#include <math.h>

static double take_double(struct input *input)
{
    int64_t bits = take_wild(input);
    double value;

    if (take_byte(input) % 2 == 0)
        return ldexp(1.0, (int)(bits % 40));
    memcpy(&value, &bits, sizeof value);
    return value;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    struct dsc_scaler_config config = DSC_SCALER_CONFIG_INIT;
    struct dsc_scaler scaler;

    config.is_dynamic = take_byte(&input) % 8 != 0;
    config.consecutive_hysteresis = take_byte(&input) % 2 == 0;
    config.initial_scale = take_double(&input);
    config.min_scale = take_double(&input);
    config.factor = take_byte(&input) % 2 == 0 ? 2.0 : take_double(&input);
    config.window_steps = take_wild(&input);
    config.hysteresis = (int32_t)take_wild(&input);
    if (dsc_scaler_init(&scaler, &config) != DSC_OK)
        return 0;
    while (input.n_left > 0) {
        struct dsc_scaler before = scaler;
        uint8_t action = take_byte(&input);
        bool is_at_floor = false;

        if (action == 255) {
            double scale = take_double(&input);
            int64_t step = take_wild(&input);
            int64_t last = take_wild(&input);
            int32_t left = (int32_t)take_wild(&input);

            if (dsc_scaler_restore(&scaler, scale, step, last, left) != DSC_OK)
                REQUIRE(memcmp(&scaler, &before, sizeof scaler) == 0);
        } else if (dsc_scaler_update(&scaler, action % 2 == 1, &is_at_floor) != DSC_OK) {
            REQUIRE(before.step == INT64_MAX && memcmp(&scaler, &before, sizeof scaler) == 0);
        } else {
            bool has_overflow = action % 2 == 1;
            double cut = fmax(before.scale / config.factor, config.min_scale);

            REQUIRE(scaler.step == before.step + 1);
            REQUIRE(scaler.last_overflow_step == (has_overflow ? before.step : before.last_overflow_step));
            REQUIRE(scaler.scale == before.scale || (config.is_dynamic && scaler.scale == (has_overflow ? cut : before.scale * config.factor)));
            REQUIRE(!is_at_floor || (has_overflow && scaler.scale <= config.min_scale && scaler.scale == before.scale));
        }
        REQUIRE(isfinite(scaler.scale) && scaler.scale > 0);
        REQUIRE(scaler.hysteresis_left >= 1 && scaler.hysteresis_left <= config.hysteresis);
    }
    return 0;
}
