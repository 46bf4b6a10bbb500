package publisher

import (
	"context"
	"time"

	"watershed.dev/platform/lifecycle"
)

// replicasPeriod is the pause between two measurements of measureReplicas.
const replicasPeriod = 15 * time.Second

// measureReplicas exports the number of missing replicas of the log until ctx ends. A lost NATS server cannot export
// that it is missing. While NATS does not respond, the last number stays.
func (p *Publisher) measureReplicas(ctx context.Context) error {
	log := string(p.Log.ID)
	defer missingReplicas.DeleteLabelValues(log)
	for ; ctx.Err() == nil; lifecycle.Sleep(ctx, replicasPeriod) {
		if missing, err := p.Log.MissingReplicas(ctx, p.JS); err == nil {
			missingReplicas.WithLabelValues(log).Set(float64(missing))
		}
	}
	return ctx.Err()
}
