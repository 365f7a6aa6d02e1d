#include "server/reload.h"

#include "server/log.h"
#include "server/status.h"

static void say(void *arg, const struct srv_config_change *change)
{
    struct srv_reload_counts *counts = arg;

    switch (change->verdict) {
    case SRV_CHANGE_MADE:
        counts->n_changed++;
        srv_log(SRV_LOG_INFO, "setting changed name=%s old=%s new=%s", change->name, change->old,
                change->wanted);
        return;
    case SRV_CHANGE_AT_START:
        counts->n_kept++;
        srv_log(SRV_LOG_WARN, "setting keeps its value, only a restart changes it name=%s value=%s wanted=%s",
                change->name, change->old, change->wanted);
        return;
    case SRV_CHANGE_ABOVE_START:
        counts->n_kept++;
        srv_log(
            SRV_LOG_WARN,
            "setting keeps its value, above its value at the start only a restart sets it name=%s value=%s "
            "wanted=%s",
            change->name, change->old, change->wanted);
        return;
    }
}

struct srv_reload_counts srv_reload_apply(struct srv_config *config, const struct srv_config *start,
                                          const struct srv_config *fresh)
{
    struct srv_reload_counts counts = {0};

    srv_config_take_over(config, start, fresh, say, &counts);
    srv_log(SRV_LOG_INFO, "configuration read again changed=%u kept=%u", counts.n_changed, counts.n_kept);
    return counts;
}

void srv_reload_refuse(const struct srv_err *err)
{
    srv_log(SRV_LOG_ERROR,
            "configuration refused, everything stays as it is reason=%s field=%s value=%s text=\"%s\"",
            srv_status_reason(err->code), err->field, err->value, err->text);
}
