/*
 * scale/scaler.c: scripts of overflows with scales written out by hand, and long random runs against a second
 * implementation of the rules, which looks at the history of steps instead of counters.
 */
#include "test.h"

#include "dsc/scaler.h"

#define MAX_STEPS 400

static struct dsc_scaler_config config_of(double initial, double min, int64_t window, int32_t hysteresis, bool is_consecutive)
{
    struct dsc_scaler_config config = DSC_SCALER_CONFIG_INIT;

    config.initial_scale = initial;
    config.min_scale = min;
    config.window_steps = window;
    config.hysteresis = hysteresis;
    config.consecutive_hysteresis = is_consecutive;
    return config;
}

/* script: 'x' an overflow, '.' a good step. wanted: the scale after each. */
static void check_script(const struct dsc_scaler_config *config, const char *script, const double *wanted, const char *floor)
{
    struct dsc_scaler scaler;

    CHECK_STATUS(dsc_scaler_init(&scaler, config), DSC_OK);
    for (int64_t i = 0; script[i] != '\0'; i++) {
        bool is_at_floor = false;

        TEST_CASE("\"%s\" at step %d: scale %g, wanted %g", script, (int)i, scaler.scale, wanted[i]);
        CHECK_STATUS(dsc_scaler_update(&scaler, script[i] == 'x', &is_at_floor), DSC_OK);
        CHECK(scaler.scale == wanted[i]);
        CHECK_EQ(is_at_floor, floor != NULL && floor[i] == '!');
        CHECK_EQ(scaler.step, i + 1);
    }
}

static void test_scripts(void)
{
    struct dsc_scaler_config config;

    /*
     * Window 2: the first growth comes 3 good steps after the start or an overflow, and each further growth after 2
     * more.
     */
    config = config_of(16, 1, 2, 1, false);
    check_script(&config, ".....x...", (const double[]){16, 16, 32, 32, 64, 32, 32, 32, 64}, NULL);
    /*
     * Hysteresis 2: the first overflow does not cut the scale. Each later overflow cuts it, until a growth refills the
     * hysteresis.
     */
    config = config_of(16, 1, 2, 2, false);
    check_script(&config, "xxx...xx", (const double[]){16, 8, 4, 4, 4, 8, 8, 4}, NULL);
    /* A good step between overflows refills the hysteresis only if consecutive hysteresis is on. */
    config = config_of(16, 1, 100, 2, false);
    check_script(&config, "x.x.x", (const double[]){16, 16, 8, 8, 4}, NULL);
    config = config_of(16, 1, 100, 2, true);
    check_script(&config, "x.x.xx", (const double[]){16, 16, 16, 16, 16, 8}, NULL);
    /* The minimum scale may be reached once. The next overflow is an error. */
    config = config_of(3, 1, 100, 1, false);
    check_script(&config, "xxxx", (const double[]){1.5, 1, 1, 1}, "..!!");
    config = config_of(1, 1, 100, 2, false);
    check_script(&config, "xx", (const double[]){1, 1}, ".!");
    /* Static. */
    config = config_of(128, 1, 1, 1, false);
    config.is_dynamic = false;
    check_script(&config, "x..xx....", (const double[]){128, 128, 128, 128, 128, 128, 128, 128, 128}, NULL);
    /* The scale does not overflow f64. */
    config = config_of(0x1p1023, 1, 1, 1, false);
    check_script(&config, "....", (const double[]){0x1p1023, 0x1p1023, 0x1p1023, 0x1p1023}, NULL);
}

/*
 * Derives the scale from the history: from the number of good steps in a row and the overflows since the last refill.
 */
static void test_histories(void)
{
    uint64_t random = 23;

    for (int round = 0; round < 300; round++) {
        double initial = ldexp(1.0, (int)test_below(&random, 12));
        double min = ldexp(1.0, (int)test_below(&random, 4));
        int64_t window = 1 + test_below(&random, 9);
        int32_t hysteresis = (int32_t)(1 + test_below(&random, 4));
        struct dsc_scaler_config config = config_of(initial, min, window, hysteresis, test_below(&random, 2) == 1);
        int64_t one_in = 2 + test_below(&random, 12);
        struct dsc_scaler scaler;
        double scale = config.initial_scale;
        int64_t n_good = 0;      /* since the last overflow */
        int64_t n_overflows = 0; /* since the last refill */

        CHECK_STATUS(dsc_scaler_init(&scaler, &config), DSC_OK);
        for (int64_t step = 0; step < MAX_STEPS; step++) {
            bool has_overflow = test_below(&random, one_in) == 0;
            bool is_at_floor = false;
            bool wants_floor = false;

            TEST_CASE("round %d step %d", round, (int)step);
            if (has_overflow) {
                n_good = 0;
                if (++n_overflows >= config.hysteresis) {
                    wants_floor = scale <= config.min_scale;
                    if (!wants_floor)
                        scale = fmax(scale / 2, config.min_scale);
                }
            } else {
                n_good++;
                if (config.consecutive_hysteresis)
                    n_overflows = 0;
                if (n_good > 1 && (n_good - 1) % config.window_steps == 0) {
                    n_overflows = 0;
                    scale *= 2;
                }
            }
            CHECK_STATUS(dsc_scaler_update(&scaler, has_overflow, &is_at_floor), DSC_OK);
            CHECK_EQ(is_at_floor, wants_floor);
            if (!CHECK(scaler.scale == scale))
                break;

            /* A restored scaler goes on as the saved one. */
            if (step == MAX_STEPS / 2) {
                struct dsc_scaler restored;

                CHECK_STATUS(dsc_scaler_init(&restored, &config), DSC_OK);
                CHECK_STATUS(dsc_scaler_restore(&restored, scaler.scale, scaler.step, scaler.last_overflow_step, scaler.hysteresis_left),
                             DSC_OK);
                scaler = restored;
            }
        }
    }
}

static void test_errors(void)
{
    const struct dsc_scaler_config good = DSC_SCALER_CONFIG_INIT;
    struct dsc_scaler_config config;
    struct dsc_scaler scaler;
    struct dsc_scaler before;
    bool is_at_floor = true;

    TEST_CASE("errors");
    memset(&scaler, 0x5a, sizeof scaler);
    before = scaler;
#define REFUSED(change, word)                                            \
    do {                                                                 \
        config = good;                                                   \
        change;                                                          \
        CHECK_ERROR(dsc_scaler_init(&scaler, &config), DSC_EINVAL, word); \
        CHECK_BYTES(&scaler, &before, sizeof scaler);                    \
    } while (0)
    REFUSED(config.size--, "size");
    REFUSED(config.initial_scale = 0, "initial_scale");
    REFUSED(config.initial_scale = -1, "initial_scale");
    REFUSED(config.initial_scale = INFINITY, "initial_scale");
    REFUSED(config.initial_scale = (double)NAN, "initial_scale");
    REFUSED(config.factor = 1, "factor");
    REFUSED(config.factor = (double)NAN, "factor");
    REFUSED(config.min_scale = 0, "min_scale");
    REFUSED(config.window_steps = 0, "window_steps");
    REFUSED(config.hysteresis = 0, "hysteresis");
#undef REFUSED
    CHECK_ERROR(dsc_scaler_init(NULL, &good), DSC_EINVAL, "scaler");
    CHECK_ERROR(dsc_scaler_init(&scaler, NULL), DSC_EINVAL, "config");

    CHECK_STATUS(dsc_scaler_init(&scaler, &good), DSC_OK);
    before = scaler;
    CHECK_ERROR(dsc_scaler_restore(&scaler, 0, 5, 3, 1), DSC_EINVAL, "scale");
    CHECK_ERROR(dsc_scaler_restore(&scaler, (double)NAN, 5, 3, 1), DSC_EINVAL, "scale");
    CHECK_ERROR(dsc_scaler_restore(&scaler, 8, -1, -1, 1), DSC_EINVAL, "step");
    CHECK_ERROR(dsc_scaler_restore(&scaler, 8, 5, 5, 1), DSC_EINVAL, "last_overflow_step");
    CHECK_ERROR(dsc_scaler_restore(&scaler, 8, 5, -2, 1), DSC_EINVAL, "last_overflow_step");
    CHECK_ERROR(dsc_scaler_restore(&scaler, 8, 5, 3, 0), DSC_EINVAL, "hysteresis_left");
    CHECK_ERROR(dsc_scaler_restore(&scaler, 8, 5, 3, 3), DSC_EINVAL, "hysteresis_left");
    CHECK_ERROR(dsc_scaler_restore(NULL, 8, 5, 3, 1), DSC_EINVAL, "scaler");
    CHECK_ERROR(dsc_scaler_update(&scaler, true, NULL), DSC_EINVAL, "out_at_floor");
    CHECK_ERROR(dsc_scaler_update(NULL, true, &is_at_floor), DSC_EINVAL, "scaler");
    CHECK_BYTES(&scaler, &before, sizeof scaler);
    CHECK(is_at_floor);
    CHECK_STATUS(dsc_scaler_restore(&scaler, 8, INT64_MAX, 3, 1), DSC_OK);
    CHECK_ERROR(dsc_scaler_update(&scaler, true, &is_at_floor), DSC_EOVERFLOW, "step");
}

int main(void)
{
    test_scripts();
    test_histories();
    test_errors();
    return test_finish(__FILE__);
}
