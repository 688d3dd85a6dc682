/*
 * Runs a fuzz target without a fuzzing engine: each corpus file as it is, then a bounded number of seeded mutations of them.
 *
 * fuzz_x [-runs=n] [-seed=n] [file or directory]...
 */
#include "fuzz.h"

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_INPUTS 256
#define MAX_BYTES 4096

struct sample {
    uint8_t bytes[MAX_BYTES];
    size_t n_bytes;
};

static struct sample corpus[MAX_INPUTS];
static int n_corpus;
static struct sample current;

static uint64_t random_bits(uint64_t *state) /* splitmix64 */
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Writes the failing input where it can be picked up. */
static void on_abort(int signal_number)
{
    static const char name[] = "fuzz-failure.bin";
    static const char text[] = "the failing input is in fuzz-failure.bin\n";
    FILE *file = fopen(name, "wb"); /* in a program that is going down, the risk is ours to take */

    if (file != NULL) {
        fwrite(current.bytes, 1, current.n_bytes, file);
        fclose(file);
        if (write(STDERR_FILENO, text, sizeof text - 1) < 0)
            _exit(1);
    }
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void load_file(const char *path)
{
    FILE *file = fopen(path, "rb");

    if (file == NULL || n_corpus == MAX_INPUTS) {
        fprintf(stderr, "cannot take %s (of at most %d inputs)\n", path, MAX_INPUTS);
        exit(2);
    }
    corpus[n_corpus].n_bytes = fread(corpus[n_corpus].bytes, 1, MAX_BYTES, file);
    n_corpus++;
    fclose(file);
}

static void load(const char *path)
{
    struct stat info;

    if (stat(path, &info) != 0) {
        fprintf(stderr, "no %s\n", path);
        exit(2);
    }
    if (!S_ISDIR(info.st_mode)) {
        load_file(path);
        return;
    }

    struct dirent **entries;
    int n_entries = scandir(path, &entries, NULL, alphasort); /* sorted: the same run on every machine */

    for (int i = 0; i < n_entries; i++) {
        char child[4096];

        snprintf(child, sizeof child, "%s/%s", path, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.')
            load_file(child);
        free(entries[i]);
    }
    if (n_entries >= 0)
        free(entries);
}

static void mutate(struct sample *sample, uint64_t *state)
{
    int n_changes = 1 + (int)(random_bits(state) % 8);

    for (int i = 0; i < n_changes; i++) {
        uint64_t choice = random_bits(state);
        size_t at = sample->n_bytes == 0 ? 0 : (size_t)(random_bits(state) % sample->n_bytes);

        switch (choice % 5) {
        case 0: /* another byte */
            if (sample->n_bytes > 0)
                sample->bytes[at] = (uint8_t)(choice >> 8);
            break;
        case 1: /* a flipped bit */
            if (sample->n_bytes > 0)
                sample->bytes[at] ^= (uint8_t)(1u << (choice >> 8 & 7));
            break;
        case 2: /* shorter */
            sample->n_bytes = at;
            break;
        case 3: /* longer by up to 64 bytes */
            for (uint64_t n = 1 + (choice >> 8) % 64; n > 0 && sample->n_bytes < MAX_BYTES; n--)
                sample->bytes[sample->n_bytes++] = (uint8_t)random_bits(state);
            break;
        default: { /* the tail of another input */
            const struct sample *other = &corpus[random_bits(state) % (uint64_t)n_corpus];
            size_t n = other->n_bytes > at ? other->n_bytes - at : 0;

            memcpy(sample->bytes + at, other->bytes + at, n);
            sample->n_bytes = at + n;
        }
        }
    }
}

static void run(const struct sample *sample)
{
    /* A block of exactly that size, so that the address sanitizer sees a read past its end. */
    uint8_t *bytes = malloc(sample->n_bytes > 0 ? sample->n_bytes : 1);

    if (bytes == NULL) {
        fprintf(stderr, "no memory\n");
        exit(2);
    }
    current = *sample;
    memcpy(bytes, sample->bytes, sample->n_bytes);
    LLVMFuzzerTestOneInput(bytes, sample->n_bytes);
    free(bytes);
}

int main(int argc, char **argv)
{
    long n_runs = 10000;
    uint64_t seed = 1;

    signal(SIGABRT, on_abort);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "-runs=", 6) == 0)
            n_runs = strtol(argv[i] + 6, NULL, 10);
        else if (strncmp(argv[i], "-seed=", 6) == 0)
            seed = strtoull(argv[i] + 6, NULL, 10);
        else
            load(argv[i]);
    }
    for (int i = 0; i < n_corpus; i++)
        run(&corpus[i]);

    int n_given = n_corpus;

    if (n_corpus == 0)
        n_corpus = 1; /* the empty input */
    for (long i = 0; i < n_runs; i++) {
        static struct sample sample;

        sample = corpus[random_bits(&seed) % (uint64_t)n_corpus];
        mutate(&sample, &seed);
        run(&sample);
    }
    printf("%s: %d inputs, %ld mutations\n", argv[0], n_given, n_runs);
    return 0;
}
