package flowcontrol

import (
	"context"
	"testing"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// Each of three gateways has a third of the cluster's seats.
func TestSeatsAreDividedAmongGateways(t *testing.T) {
	f := newTestFairness(600)
	f.client = fake.NewClientset(&flowcontrolv1.PriorityLevelConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "exempt"},
		Spec: flowcontrolv1.PriorityLevelConfigurationSpec{
			Type:   flowcontrolv1.PriorityLevelEnablementExempt,
			Exempt: &flowcontrolv1.ExemptPriorityLevelConfiguration{},
		},
	})
	f.ready = make(chan struct{})
	f.active.Store(f.controller(600))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); f.Run(ctx) }()
	f.gateways.Set(3)
	for until := time.Now().Add(20 * time.Second); f.active.Load().seats != 200; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("it has %d of 600 seats", f.active.Load().seats)
		}
	}
	cancel()
	<-ended
}
