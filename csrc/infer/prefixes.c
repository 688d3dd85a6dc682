/*
 * The index of prefixes: a trie whose nodes are full blocks of tokens. A child is found by a hash, and confirmed by its
 * parent and its tokens. A node lives as long as a pool keeps its block, a child needs it, or a chain stands at it.
 */
#include "infer/pool.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_BUCKETS 64

struct node {
    struct node *next; /* of its bucket */
    struct node *parent;
    uint64_t hash;
    int64_t n_users;               /* blocks, children and chains */
    size_t n_salt;                 /* of a root */
    unsigned char *salt;           /* likewise; NULL where it has no bytes */
    int64_t tokens[DSC_KV_TOKENS]; /* of all others */
    int32_t blocks[];              /* one for each pool, or DSC_KV_GONE */
};

/* The tokens of a sequence, as far as they were noted. */
struct chain {
    bool is_live;
    struct node
        *node; /* of its full blocks; NULL where there was no memory for a node: the chain is not followed then */
    int64_t tail[DSC_KV_TOKENS];
    int32_t n_tail;
    int64_t n_full;
    int32_t *sequences; /* of each pool */
};

struct member {
    struct dsc_kv_prefixes *prefixes;
    struct dsc_kv_pool *pool;
    struct node **owners; /* of each block */
    int64_t window;       /* 0: none */
    int32_t index;
};

struct dsc_kv_prefixes {
    int32_t n_pools;
    struct member *members;
    uint64_t seed;
    struct node **buckets;
    uint64_t n_buckets; /* a power of two */
    int64_t n_nodes;
    struct chain *chains;
    int32_t n_chains;
    int32_t n_live;
};

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

static uint64_t hash_tokens(const struct node *parent, const int64_t *tokens)
{
    uint64_t hash = parent->hash;

    for (int i = 0; i < DSC_KV_TOKENS; i++)
        hash = mix(hash, (uint64_t)tokens[i]);
    return hash;
}

static uint64_t hash_salt(const struct dsc_kv_prefixes *prefixes, const unsigned char *salt, size_t n)
{
    uint64_t hash = mix(prefixes->seed, n);

    for (size_t i = 0; i < n; i++)
        hash = mix(hash, salt[i]);
    return hash;
}

static bool is_child(const struct node *node, const struct node *parent, const int64_t *tokens)
{
    return node->parent == parent && memcmp(node->tokens, tokens, sizeof node->tokens) == 0;
}

static bool is_root(const struct node *node, const unsigned char *salt, size_t n)
{
    return node->parent == NULL && node->n_salt == n && (n == 0 || memcmp(node->salt, salt, n) == 0);
}

static struct node *find_child(const struct dsc_kv_prefixes *prefixes, const struct node *parent, const int64_t *tokens)
{
    uint64_t hash = hash_tokens(parent, tokens);
    struct node *node = prefixes->buckets[hash & (prefixes->n_buckets - 1)];

    while (node != NULL && !(node->hash == hash && is_child(node, parent, tokens)))
        node = node->next;
    return node;
}

static struct node *find_root(const struct dsc_kv_prefixes *prefixes, const unsigned char *salt, size_t n)
{
    uint64_t hash = hash_salt(prefixes, salt, n);
    struct node *node = prefixes->buckets[hash & (prefixes->n_buckets - 1)];

    while (node != NULL && !(node->hash == hash && is_root(node, salt, n)))
        node = node->next;
    return node;
}

/* More buckets where there are more nodes than buckets. Without memory for them, chains of nodes grow longer. */
static void widen_table(struct dsc_kv_prefixes *prefixes)
{
    uint64_t n_buckets = 2 * prefixes->n_buckets;
    struct node **buckets;

    if ((uint64_t)prefixes->n_nodes < prefixes->n_buckets || (buckets = calloc(n_buckets, sizeof(void *))) == NULL)
        return;
    for (uint64_t i = 0; i < prefixes->n_buckets; i++)
        for (struct node *node = prefixes->buckets[i], *next; node != NULL; node = next) {
            struct node **place = &buckets[node->hash & (n_buckets - 1)];

            next = node->next;
            node->next = *place;
            *place = node;
        }
    free(prefixes->buckets);
    prefixes->buckets = buckets;
    prefixes->n_buckets = n_buckets;
}

/* A node without users, in the table. NULL: no memory. */
static struct node *make_node(struct dsc_kv_prefixes *prefixes, struct node *parent, uint64_t hash)
{
    struct node *node = calloc(1, sizeof *node + (size_t)prefixes->n_pools * sizeof node->blocks[0]);
    struct node **place;

    if (node == NULL)
        return NULL;
    widen_table(prefixes);
    place = &prefixes->buckets[hash & (prefixes->n_buckets - 1)];
    node->next = *place;
    node->parent = parent;
    node->hash = hash;
    for (int32_t i = 0; i < prefixes->n_pools; i++)
        node->blocks[i] = DSC_KV_GONE;
    if (parent != NULL)
        parent->n_users++;
    *place = node;
    prefixes->n_nodes++;
    return node;
}

static struct node *make_child(struct dsc_kv_prefixes *prefixes, struct node *parent, const int64_t *tokens)
{
    struct node *node = make_node(prefixes, parent, hash_tokens(parent, tokens));

    if (node != NULL)
        memcpy(node->tokens, tokens, sizeof node->tokens);
    return node;
}

static struct node *make_root(struct dsc_kv_prefixes *prefixes, const unsigned char *salt, size_t n)
{
    unsigned char *own = n == 0 ? NULL : malloc(n);
    struct node *node;

    if (n > 0 && own == NULL)
        return NULL;
    node = make_node(prefixes, NULL, hash_salt(prefixes, salt, n));
    if (node == NULL) {
        free(own);
        return NULL;
    }
    if (n > 0)
        memcpy(own, salt, n);
    node->salt = own;
    node->n_salt = n;
    return node;
}

static void free_node(struct dsc_kv_prefixes *prefixes, struct node *node)
{
    struct node **place = &prefixes->buckets[node->hash & (prefixes->n_buckets - 1)];

    while (*place != node)
        place = &(*place)->next;
    *place = node->next;
    prefixes->n_nodes--;
    free(node->salt);
    free(node);
}

/* One user less. A node without users goes, and is a user of its parent no more. */
static void leave(struct dsc_kv_prefixes *prefixes, struct node *node)
{
    while (node != NULL && --node->n_users == 0) {
        struct node *parent = node->parent;

        free_node(prefixes, node);
        node = parent;
    }
}

static void forget(void *arg, int32_t block)
{
    struct member *member = arg;
    struct node *node = member->owners[block];

    member->owners[block] = NULL;
    node->blocks[member->index] = DSC_KV_GONE;
    leave(member->prefixes, node);
}

static dsc_status join(struct member *member)
{
    struct dsc_kv_counts counts;

    dsc_kv_count(member->pool, &counts);
    member->owners = calloc((size_t)counts.n_blocks + 1, sizeof(void *));
    if (member->owners == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the owners of %d blocks", (int)counts.n_blocks);
    return dsc_kv_set_keeper(member->pool, forget, member);
}

dsc_status dsc_kv_prefixes_open(int32_t n_pools, struct dsc_kv_pool *const *pools, const int64_t *windows,
                                uint64_t seed, struct dsc_kv_prefixes **out)
{
    struct dsc_kv_prefixes *prefixes;
    dsc_status status = DSC_OK;

    if (n_pools < 1)
        return dsc_fail(DSC_EINVAL, "n_pools is %d, must be positive", (int)n_pools);
    for (int32_t i = 0; i < n_pools; i++)
        if (windows[i] < 0)
            return dsc_fail(DSC_EINVAL, "windows[%d] is %lld, must not be negative", (int)i, (long long)windows[i]);
    prefixes = calloc(1, sizeof *prefixes);
    if (prefixes != NULL) {
        prefixes->members = calloc((size_t)n_pools, sizeof *prefixes->members);
        prefixes->buckets = calloc(FIRST_BUCKETS, sizeof(void *));
    }
    if (prefixes == NULL || prefixes->members == NULL || prefixes->buckets == NULL) {
        dsc_kv_prefixes_close(prefixes);
        return dsc_fail(DSC_ENOMEM, "no memory for an index of prefixes");
    }
    prefixes->seed = seed;
    prefixes->n_buckets = FIRST_BUCKETS;
    for (int32_t i = 0; i < n_pools && status == DSC_OK; i++) {
        struct member *member = &prefixes->members[i];

        *member = (struct member){.prefixes = prefixes, .pool = pools[i], .window = windows[i], .index = i};
        status = join(member);
        if (status == DSC_OK)
            prefixes->n_pools++;
        else
            free(member->owners);
    }
    if (status != DSC_OK) {
        dsc_kv_prefixes_close(prefixes);
        return status;
    }
    *out = prefixes;
    return DSC_OK;
}

void dsc_kv_prefixes_close(struct dsc_kv_prefixes *prefixes)
{
    if (prefixes == NULL)
        return;
    for (int32_t i = 0; i < prefixes->n_pools; i++) {
        dsc_kv_clear_keeper(prefixes->members[i].pool);
        free(prefixes->members[i].owners);
    }
    for (int32_t i = 0; i < prefixes->n_chains; i++)
        free(prefixes->chains[i].sequences);
    for (uint64_t i = 0; prefixes->buckets != NULL && i < prefixes->n_buckets; i++)
        for (struct node *node = prefixes->buckets[i], *next; node != NULL; node = next) {
            next = node->next;
            free(node->salt);
            free(node);
        }
    free(prefixes->chains);
    free(prefixes->buckets);
    free(prefixes->members);
    free(prefixes);
}

void dsc_kv_prefixes_count(const struct dsc_kv_prefixes *prefixes, struct dsc_kv_prefix_counts *out)
{
    *out = (struct dsc_kv_prefix_counts){prefixes->n_nodes, prefixes->n_live};
}

/* A slot for a chain, with room for the numbers of its sequences. */
static dsc_status find_slot(struct dsc_kv_prefixes *prefixes, int32_t *out)
{
    int32_t slot = 0;

    while (prefixes->n_live < prefixes->n_chains && prefixes->chains[slot].is_live)
        slot++;
    if (prefixes->n_live == prefixes->n_chains) {
        int32_t n = prefixes->n_chains < 8 ? 8 : 2 * prefixes->n_chains;
        struct chain *chains = realloc(prefixes->chains, (size_t)n * sizeof *chains);

        if (chains == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for %d chains", (int)n);
        memset(chains + prefixes->n_chains, 0, (size_t)(n - prefixes->n_chains) * sizeof *chains);
        prefixes->chains = chains;
        slot = prefixes->n_chains;
        prefixes->n_chains = n;
    }
    if (prefixes->chains[slot].sequences == NULL)
        prefixes->chains[slot].sequences = malloc((size_t)prefixes->n_pools * sizeof(int32_t));
    if (prefixes->chains[slot].sequences == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the sequences of a chain");
    *out = slot;
    return DSC_OK;
}

dsc_status dsc_kv_prefixes_begin(struct dsc_kv_prefixes *prefixes, const int32_t *sequences, const void *salt,
                                 size_t n_salt, int32_t *out_chain)
{
    struct chain *chain;
    struct node *root;
    int32_t slot = 0;

    for (int32_t i = 0; i < prefixes->n_pools; i++)
        DSC_TRY(dsc_kv_check_live(prefixes->members[i].pool, sequences[i]));
    DSC_TRY(find_slot(prefixes, &slot));
    root = find_root(prefixes, salt, n_salt);
    if (root == NULL)
        root = make_root(prefixes, salt, n_salt);
    if (root == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a salt of %zu bytes", n_salt);
    root->n_users++;
    chain = &prefixes->chains[slot];
    memcpy(chain->sequences, sequences, (size_t)prefixes->n_pools * sizeof *sequences);
    chain->is_live = true;
    chain->node = root;
    chain->n_full = chain->n_tail = 0;
    prefixes->n_live++;
    *out_chain = slot;
    return DSC_OK;
}

static dsc_status check_chain(const struct dsc_kv_prefixes *prefixes, int32_t chain)
{
    if (chain < 0 || chain >= prefixes->n_chains || !prefixes->chains[chain].is_live)
        return dsc_fail(DSC_EINVAL, "chain is %d, which is none of this index", (int)chain);
    return DSC_OK;
}

dsc_status dsc_kv_prefixes_end(struct dsc_kv_prefixes *prefixes, int32_t chain)
{
    DSC_TRY(check_chain(prefixes, chain));
    leave(prefixes, prefixes->chains[chain].node);
    prefixes->chains[chain].is_live = false;
    prefixes->n_live--;
    return DSC_OK;
}

/* The first block that a token behind n_full blocks sees. */
static int64_t first_seen(const struct member *member, int64_t n_full)
{
    int64_t first = n_full * DSC_KV_TOKENS - member->window + 1;

    return member->window == 0 || first < 0 ? 0 : first / DSC_KV_TOKENS;
}

/* How many of the nodes, from the first on, have a block in pool i. */
static int64_t count_led(struct node *const *path, int64_t n, int32_t i)
{
    int64_t n_led = 0;

    while (n_led < n && path[n_led]->blocks[i] != DSC_KV_GONE)
        n_led++;
    return n_led;
}

/* Whether a new sequence of n nodes finds in pool i all blocks that its next token sees. */
static bool is_seen_through(const struct member *member, struct node *const *path, int64_t n)
{
    int64_t first = first_seen(member, n);

    return count_led(path + first, n - first, member->index) == n - first;
}

/*
 * The nodes behind `node`, of n tokens at most, whose blocks are there as far as the next token needs them in each
 * pool. n_full: blocks before them. path has room for n / DSC_KV_TOKENS nodes. Returns how many there are.
 */
static int64_t follow(const struct dsc_kv_prefixes *prefixes, const struct node *node, int64_t n_full, int64_t n,
                      const int64_t *tokens, struct node **path)
{
    int64_t n_nodes = 0;
    bool is_complete;

    while ((n_nodes + 1) * DSC_KV_TOKENS <= n) {
        path[n_nodes] = find_child(prefixes, node, tokens + n_nodes * DSC_KV_TOKENS);
        if (path[n_nodes] == NULL)
            break;
        node = path[n_nodes++];
    }
    /* Only a sequence without blocks may begin with some that are gone. */
    for (int32_t i = 0; i < prefixes->n_pools; i++)
        if (n_full > 0 || prefixes->members[i].window == 0)
            n_nodes = count_led(path, n_nodes, i);
    if (n_full > 0)
        return n_nodes;
    for (; n_nodes > 0; n_nodes--) {
        is_complete = true;
        for (int32_t i = 0; i < prefixes->n_pools && is_complete; i++)
            is_complete = prefixes->members[i].window == 0 || is_seen_through(&prefixes->members[i], path, n_nodes);
        if (is_complete)
            break;
    }
    return n_nodes;
}

/* Tokens that may be found: the last one is always computed, because its logits are asked for. */
static int64_t most_found(int64_t n_tokens)
{
    return n_tokens > 0 ? n_tokens - 1 : 0;
}

static dsc_status make_path(int64_t n_tokens, struct node ***out)
{
    *out = malloc(((size_t)(n_tokens / DSC_KV_TOKENS) + 1) * sizeof **out);
    if (*out == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the blocks of %lld tokens", (long long)n_tokens);
    return DSC_OK;
}

static dsc_status check_tokens(int64_t n_tokens)
{
    if (n_tokens < 0)
        return dsc_fail(DSC_EINVAL, "n_tokens is %lld, must not be negative", (long long)n_tokens);
    return DSC_OK;
}

dsc_status dsc_kv_prefixes_find(const struct dsc_kv_prefixes *prefixes, const void *salt, size_t n_salt,
                                int64_t n_tokens, const int64_t *tokens, int64_t *out_found)
{
    const struct node *root = find_root(prefixes, salt, n_salt);
    struct node **path;

    DSC_TRY(check_tokens(n_tokens));
    *out_found = 0;
    if (root == NULL)
        return DSC_OK;
    DSC_TRY(make_path(n_tokens, &path));
    *out_found = DSC_KV_TOKENS * follow(prefixes, root, 0, most_found(n_tokens), tokens, path);
    free(path);
    return DSC_OK;
}

/* Puts the blocks of the nodes behind those of the chain's sequences. */
static dsc_status attach(struct dsc_kv_prefixes *prefixes, const struct chain *chain, int64_t n, struct node **path)
{
    int32_t *blocks = malloc((size_t)n * sizeof *blocks);
    dsc_status status = DSC_OK;

    if (blocks == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the numbers of %lld blocks", (long long)n);
    for (int32_t i = 0; i < prefixes->n_pools && status == DSC_OK; i++)
        status = dsc_kv_reserve(prefixes->members[i].pool, chain->sequences[i], n);
    for (int32_t i = 0; i < prefixes->n_pools && status == DSC_OK; i++) {
        int64_t first = chain->n_full == 0 ? first_seen(&prefixes->members[i], n) : 0;

        for (int64_t j = 0; j < n; j++)
            blocks[j] = j < first ? DSC_KV_GONE : path[j]->blocks[i];
        dsc_kv_attach(prefixes->members[i].pool, chain->sequences[i], n, blocks);
    }
    free(blocks);
    return status;
}

dsc_status dsc_kv_prefixes_take(struct dsc_kv_prefixes *prefixes, int32_t number, int64_t n_tokens,
                                const int64_t *tokens, int64_t *out_found)
{
    const struct chain *chain;
    struct node **path;
    dsc_status status = DSC_OK;
    int64_t n_found;

    DSC_TRY(check_chain(prefixes, number));
    DSC_TRY(check_tokens(n_tokens));
    chain = &prefixes->chains[number];
    *out_found = 0;
    if (chain->node == NULL || chain->n_tail > 0)
        return DSC_OK;
    DSC_TRY(make_path(n_tokens, &path));
    n_found = follow(prefixes, chain->node, chain->n_full, most_found(n_tokens), tokens, path);
    if (n_found > 0)
        status = attach(prefixes, chain, n_found, path);
    free(path);
    if (status == DSC_OK)
        *out_found = n_found * DSC_KV_TOKENS;
    return status;
}

/* The full block that the chain's tail is: its node, and the blocks that the pools keep for it from now on. */
static void note_block(struct dsc_kv_prefixes *prefixes, struct chain *chain)
{
    struct node *node = find_child(prefixes, chain->node, chain->tail);
    struct node *before = chain->node;

    if (node == NULL)
        node = make_child(prefixes, before, chain->tail);
    chain->node = node;
    if (node != NULL)
        node->n_users++;
    for (int32_t i = 0; i < prefixes->n_pools && node != NULL; i++) {
        struct member *member = &prefixes->members[i];
        int32_t block = DSC_KV_GONE;

        if (chain->n_full < dsc_kv_n_full(member->pool, chain->sequences[i]))
            block = dsc_kv_block(member->pool, chain->sequences[i], chain->n_full);
        if (block == DSC_KV_GONE || node->blocks[i] != DSC_KV_GONE || member->owners[block] != NULL)
            continue;
        node->blocks[i] = block;
        node->n_users++;
        member->owners[block] = node;
        dsc_kv_keep(member->pool, block);
    }
    leave(prefixes, before);
}

dsc_status dsc_kv_prefixes_note(struct dsc_kv_prefixes *prefixes, int32_t number, int64_t n_tokens,
                                const int64_t *tokens)
{
    struct chain *chain;

    DSC_TRY(check_chain(prefixes, number));
    DSC_TRY(check_tokens(n_tokens));
    chain = &prefixes->chains[number];
    for (int64_t i = 0; i < n_tokens && chain->node != NULL; i++) {
        chain->tail[chain->n_tail++] = tokens[i];
        if (chain->n_tail < DSC_KV_TOKENS)
            continue;
        note_block(prefixes, chain);
        chain->n_full++;
        chain->n_tail = 0;
    }
    return DSC_OK;
}
