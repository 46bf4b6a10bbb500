package flowcontrol

import (
	"context"
	"testing"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/client-go/kubernetes/fake"
)

// exempt returns the mandatory objects for administrators, as the API has them.
func exempt() (*flowcontrolv1.PriorityLevelConfiguration, *flowcontrolv1.FlowSchema) {
	level := bootstrap.MandatoryPriorityLevelConfigurationExempt.DeepCopy()
	schema := bootstrap.MandatoryFlowSchemaExempt.DeepCopy()
	level.UID, schema.UID = "level", "schema"
	return level, schema
}

// start starts the flow control of 600 seats, of an API with these objects, until the test ends.
func start(t *testing.T, objects ...runtime.Object) *Fairness {
	f := newTestFairness(600)
	f.client = fake.NewClientset(objects...)
	f.ready = make(chan struct{})
	f.active.Store(f.controller(600))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return f
}

// Each of three gateways has a third of the cluster's seats.
func TestSeatsAreDividedAmongGateways(t *testing.T) {
	level, schema := exempt()
	f := start(t, level, schema)
	f.gateways.Set(3)
	for until := time.Now().Add(2 * time.Minute); f.active.Load().seats != 200; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("it has %d of 600 seats", f.active.Load().seats)
		}
	}
}

// Flow control is ready once its headers have the UIDs of the API's objects: a FlowSchema may come after its level.
func TestReadyOnceTheObjectsAreApplied(t *testing.T) {
	level, schema := exempt()
	f := start(t, level)
	select {
	case <-f.Ready():
		t.Fatal("it is ready without a FlowSchema")
	case <-time.After(10 * syncPollInterval):
	}
	schemas := f.client.FlowcontrolV1().FlowSchemas()
	if _, err := schemas.Create(t.Context(), schema, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-f.Ready():
	case <-time.After(2 * time.Minute):
		t.Fatal("it is not ready")
	}
}
