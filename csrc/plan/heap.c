/* A binary heap of events. */
#include "base/fail.h"
#include "plan/simulate.h"

#include <stdlib.h>

dsc_status dsc_plan_push_event(struct plan_heap *heap, struct plan_event event)
{
    int64_t i = heap->n;

    if (heap->n == heap->capacity) {
        int64_t capacity = heap->capacity == 0 ? 1024 : 2 * heap->capacity;
        struct plan_event *events = realloc(heap->events, (size_t)capacity * sizeof *events);

        if (events == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for %lld events", (long long)capacity);
        heap->events = events;
        heap->capacity = capacity;
    }
    heap->n++;
    for (; i > 0 && heap->events[(i - 1) / 2].ns > event.ns; i = (i - 1) / 2)
        heap->events[i] = heap->events[(i - 1) / 2];
    heap->events[i] = event;
    return DSC_OK;
}

struct plan_event dsc_plan_pop_event(struct plan_heap *heap)
{
    struct plan_event first = heap->events[0];
    struct plan_event last = heap->events[--heap->n];
    int64_t i = 0;

    for (int64_t child = 1; child < heap->n; child = 2 * i + 1) {
        if (child + 1 < heap->n && heap->events[child + 1].ns < heap->events[child].ns)
            child++;
        if (heap->events[child].ns >= last.ns)
            break;
        heap->events[i] = heap->events[child];
        i = child;
    }
    heap->events[i] = last;
    return first;
}
