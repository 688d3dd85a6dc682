/*
 * Addresses of segments (dsc_comm_attach): a text is attached to only if it is the address of that rank's segment, and
 * is refused with a sentence otherwise; a refusal leaves the end unchanged. Process and descriptor stay those of this
 * process, so that no other process's files are opened.
 */
#include "fuzz.h"

#include "dsc/comm.h"

enum { N_PARTS = 7, PID = 3, FD = 4, TEXT_BYTES = 600 };

static dsc_comm *make_end(int32_t rank)
{
    struct dsc_comm_config config = DSC_COMM_CONFIG_INIT;
    dsc_comm *comm = NULL;

    config.rank = rank;
    config.n_ranks = 2;
    config.arena_bytes = 1;
    REQUIRE(dsc_comm_create(&config, &comm) == DSC_OK);
    return comm;
}

/* A part of an address: as it is, cut, with other characters, or replaced. */
static void append_part(struct input *input, const char *part, size_t n, bool is_fixed, char *text)
{
    size_t at = strlen(text);
    uint8_t kind = is_fixed ? 0 : take_byte(input) % 8;

    if (at + n + 24 > TEXT_BYTES)
        return;
    if (kind == 5)
        n = (size_t)take_below(input, (int64_t)n + 1);
    memcpy(text + at, part, n);
    text[at + n] = '\0';
    if (kind == 6 && n > 0)
        text[at + (size_t)take_below(input, (int64_t)n)] = (char)(take_byte(input) | 1); /* no end */
    if (kind == 7)
        snprintf(text + at, 24, "%lld", (long long)take_wild(input));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    dsc_comm *own = make_end(0);
    dsc_comm *other = make_end(1);
    const char *address = dsc_comm_address(other);
    const char *addresses[2] = {dsc_comm_address(own), address};
    char text[TEXT_BYTES] = "";

    while (input.n_left > 0) {
        const char *part = address;

        text[0] = '\0';
        for (int32_t i = 0; i < N_PARTS; i++) {
            size_t n = strcspn(part, ":");

            append_part(&input, part, n, i == PID || i == FD, text);
            part += n + 1;
            if (i + 1 < N_PARTS || take_byte(&input) % 16 == 0)
                strcat(text, ":");
        }
        addresses[1] = text;
        if (strcmp(text, address) != 0) {
            REQUIRE(dsc_comm_attach(own, addresses) != DSC_OK);
            REQUIRE(dsc_last_error()[0] != '\0');
        }
    }
    addresses[1] = address;
    REQUIRE(dsc_comm_attach(own, addresses) == DSC_OK);
    dsc_comm_destroy(own);
    dsc_comm_destroy(other);
    return 0;
}
