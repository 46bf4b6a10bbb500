package flowcontrol

import (
	"slices"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
)

// sanitize corrects an object in etcd that validation would have rejected. Upstream's controller relies on validation,
// and an invalid object would stop it for all objects. A level without valid limits admits nothing. A subject without
// its field is removed.
func sanitize(obj any) (any, error) {
	switch o := obj.(type) {
	case *flowcontrolv1.PriorityLevelConfiguration:
		if !validLevel(&o.Spec) {
			o = o.DeepCopy()
			none := int32(0)
			o.Spec = flowcontrolv1.PriorityLevelConfigurationSpec{
				Type: flowcontrolv1.PriorityLevelEnablementLimited,
				Limited: &flowcontrolv1.LimitedPriorityLevelConfiguration{
					NominalConcurrencyShares: &none,
					LendablePercent:          &none,
					LimitResponse:            flowcontrolv1.LimitResponse{Type: flowcontrolv1.LimitResponseTypeReject},
				},
			}
			return o, nil
		}
	case *flowcontrolv1.FlowSchema:
		o = o.DeepCopy()
		for i := range o.Spec.Rules {
			o.Spec.Rules[i].Subjects = slices.DeleteFunc(o.Spec.Rules[i].Subjects, func(s flowcontrolv1.Subject) bool {
				return s.Kind == flowcontrolv1.SubjectKindUser && s.User == nil ||
					s.Kind == flowcontrolv1.SubjectKindGroup && s.Group == nil ||
					s.Kind == flowcontrolv1.SubjectKindServiceAccount && s.ServiceAccount == nil
			})
		}
		return o, nil
	}
	return obj, nil
}

func validLevel(s *flowcontrolv1.PriorityLevelConfigurationSpec) bool {
	switch s.Type {
	case flowcontrolv1.PriorityLevelEnablementExempt:
		return s.Limited == nil
	case flowcontrolv1.PriorityLevelEnablementLimited:
		l := s.Limited
		if l == nil || l.NominalConcurrencyShares == nil || s.Exempt != nil {
			return false
		}
		q := l.LimitResponse.Queuing
		if l.LimitResponse.Type == flowcontrolv1.LimitResponseTypeQueue {
			return q != nil && q.Queues > 0 && q.HandSize > 0 && q.HandSize <= q.Queues && q.QueueLengthLimit > 0
		}
		return q == nil
	}
	return false
}
