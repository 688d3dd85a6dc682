/* Converts an action to text and back: stage, letters, micro-batch. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdio.h>
#include <string.h>

static const char *const letters[DSC_PIPE_N_KINDS] = {
#define DSC_PIPE_LETTERS(name, text) text,
    DSC_PIPE_KIND_MAP(DSC_PIPE_LETTERS)
#undef DSC_PIPE_LETTERS
};

dsc_status dsc_pipe_format(const struct dsc_pipe_action *action, size_t n_bytes, char *out_text)
{
    if (action == NULL || out_text == NULL)
        return dsc_fail(DSC_EINVAL, "action or out_text is NULL");
    if (action->kind < 0 || action->kind >= DSC_PIPE_N_KINDS || action->stage < 0 || action->micro_batch < 0)
        return dsc_fail(DSC_EINVAL, "kind %d, stage %d, micro-batch %d is no action", (int)action->kind,
                        (int)action->stage, (int)action->micro_batch);

    char text[40];
    int n = snprintf(text, sizeof text, "%d%s%d", (int)action->stage, letters[action->kind], (int)action->micro_batch);

    if ((size_t)n >= n_bytes)
        return dsc_fail(DSC_ENOSPC, "%d bytes for an action of %d", (int)n_bytes, n + 1);
    memcpy(out_text, text, (size_t)n + 1);
    return DSC_OK;
}

/* Reads digits without sign or leading zeros; NULL if there are no digits or the number is too large. */
static const char *parse_number(const char *text, int32_t *out_number)
{
    int64_t number = 0;
    const char *end = text;

    while (*end >= '0' && *end <= '9' && number <= INT32_MAX)
        number = number * 10 + (*end++ - '0');
    if (end == text || number > INT32_MAX || (*text == '0' && end != text + 1))
        return NULL;
    *out_number = (int32_t)number;
    return end;
}

dsc_status dsc_pipe_parse(const char *text, struct dsc_pipe_action *out_action)
{
    if (text == NULL || out_action == NULL)
        return dsc_fail(DSC_EINVAL, "text or out_action is NULL");

    struct dsc_pipe_action action = {0};
    const char *rest = parse_number(text, &action.stage);

    for (int32_t kind = 0; rest != NULL && kind < DSC_PIPE_N_KINDS; kind++) {
        size_t n = strlen(letters[kind]);
        const char *end = strncmp(rest, letters[kind], n) == 0 ? parse_number(rest + n, &action.micro_batch) : NULL;

        if (end != NULL && *end == '\0') {
            action.kind = kind;
            *out_action = action;
            return DSC_OK;
        }
    }
    return dsc_fail(DSC_EINVAL, "\"%.60s\" is no action: a stage, letters and a micro-batch, as 2F0 or 0SEND_F5", text);
}
