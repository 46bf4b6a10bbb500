package main
func applies() []*shape { return nil }
func bodies() []*shape { return nil }
func objects() []*shape { return nil }
func definitions() []*shape { return nil }
func conversions() []*shape { return nil }
func admissions() []*shape { return nil }
func lists() []*shape { return nil }
func watches() []*shape { return nil }
func identities() []*shape { return nil }
func reviews() []*shape { return nil }
func limits() []*shape { return nil }
func connections() []*shape { return nil }
func frames() []*shape { return nil }
func upgrades() []*shape { return nil }
func aggregations() []*shape { return nil }
func discoveries() []*shape { return nil }
